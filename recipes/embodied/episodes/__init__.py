"""Collection of whole episodes for recordings, evaluations and videos; nothing is trained on them."""
