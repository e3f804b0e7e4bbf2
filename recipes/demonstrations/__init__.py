"""Demonstrations on disk: LeRobotDataset folders, read and written; HDF5 files of LIBERO and robomimic, read."""
