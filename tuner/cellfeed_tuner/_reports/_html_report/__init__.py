"""What ``autotune`` found, as one page that needs nothing beside it."""

from cellfeed_tuner._reports._html_report._page import html_report

__all__ = ["html_report"]
