"""Attention of Dask arrays. (A folder called dask would be what `import dask` finds in tests.)"""
