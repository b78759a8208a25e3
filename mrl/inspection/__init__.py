"""Inspection of the exchange of a run, for a person: `mrl inspect`.

- `stat_client`      the account of a daemon that answers
- `file_stats`       the account from the run's file, as far as the file tells
- `exchange_tables`  the account as tables, with rates between two accounts
- `shown_records`    one record as lines that are safe on a terminal
"""
