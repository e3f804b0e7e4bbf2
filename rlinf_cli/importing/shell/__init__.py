"""The command line inside a shell script, read without a shell: no command of a script is ever run."""
