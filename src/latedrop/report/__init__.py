"""Everything about a calibration in one HTML file."""

from latedrop.report.page import Picture, overview, png, table, write_report

__all__ = ["Picture", "overview", "png", "table", "write_report"]
