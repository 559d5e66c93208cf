"""Published data sets, brought into the columns that training reads."""
