"""Everything about a calibration in one HTML file.

It may import `evaluation` and every room that this may import.
"""

from latedrop.report.class_page import write_class_report
from latedrop.report.page import page_of, write_report
from latedrop.report.pictures import Picture, overview, png
from latedrop.report.tables import site_table, table

__all__ = ["Picture", "overview", "page_of", "png", "site_table", "table", "write_class_report", "write_report"]
