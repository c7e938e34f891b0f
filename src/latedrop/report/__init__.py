"""Everything about a calibration in one HTML file."""

from latedrop.report.page import write_report
from latedrop.report.pictures import Picture, overview, png
from latedrop.report.tables import site_table, table

__all__ = ["Picture", "overview", "png", "site_table", "table", "write_report"]
