"""Renders the page `report.html`."""
