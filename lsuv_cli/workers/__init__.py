"""Workers: processes on this machine or on several, each with a share of the batches, on Ray core.

The only user of ray, which is imported only where workers are asked for.
"""
