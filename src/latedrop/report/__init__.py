"""Everything about a calibration in one HTML file.

It may import `evaluation` and every room that this may import.
"""

from latedrop.report.page import page_of, write_class_report, write_report
from latedrop.report.tables import site_table, table

__all__ = ["page_of", "site_table", "table", "write_class_report", "write_report"]
