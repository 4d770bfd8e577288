"""A decision as one self-contained HTML page: no script, no network, light and dark."""

from heterps.page.document import decision_page, with_curve, write_page

__all__ = ["decision_page", "with_curve", "write_page"]
