"""Charts of a report, one file for each; bokeh draws them."""
