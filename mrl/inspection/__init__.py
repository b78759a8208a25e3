"""What the exchange of a run holds, shown to a person: `mrl inspect`.

- `asked_daemon`     the account of a daemon that answers
- `file_account`     the same from the run's file, as far as that tells
- `exchange_tables`  the account as tables, with rates between two looks
- `shown_records`    one record as lines that a terminal can bear
"""
