"""What `rlinf doctor` judges: functions from what nodes say to findings, one file for each subject."""
