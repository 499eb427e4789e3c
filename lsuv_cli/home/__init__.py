"""The way home: initialized weights under the names and layouts of the framework that exported the model."""
