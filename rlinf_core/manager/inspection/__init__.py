"""The activity of the processes of a running job, for people: by name, with stacks, and who holds the others up."""
