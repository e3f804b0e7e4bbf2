"""LeRobotDatasets: description, tables, images, fault checks, and a writer."""
