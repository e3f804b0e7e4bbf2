"""Devices by which a person takes over: keyboard, gamepad, SpaceMouse."""
