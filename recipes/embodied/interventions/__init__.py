"""People in the loop: devices, a browser page and scripts that take over from the policy for some steps."""
