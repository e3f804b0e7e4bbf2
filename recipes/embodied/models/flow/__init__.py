"""Policies that draw actions by flow matching."""
