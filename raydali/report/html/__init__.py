"""The page `report.html`."""
