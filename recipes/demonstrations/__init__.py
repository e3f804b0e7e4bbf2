"""Demonstrations on disk: reads and writes LeRobotDataset folders, and reads HDF5 files of LIBERO and robomimic."""
