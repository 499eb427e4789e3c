"""The way home: initialized weights under the names and in the layouts of the network that was exported."""
