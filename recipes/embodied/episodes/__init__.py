"""Collection of whole episodes for recordings, evaluations and videos, without training."""
