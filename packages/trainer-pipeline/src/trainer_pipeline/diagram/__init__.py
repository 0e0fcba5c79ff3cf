"""What each rank of a pipeline computes and when it waits, as text and as a picture."""

from .drawing import draw_schedule
from .simulation import simulate, textbook_bubble
from .timeline import Bar, Timeline

__all__ = ["Bar", "Timeline", "draw_schedule", "simulate", "textbook_bubble"]
