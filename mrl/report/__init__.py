"""Report: what a person looks at, while a run goes on and afterwards.

While it goes on: `progress` reduces telemetry to one state, `live` draws it on a terminal, `console_lines` says it in
plain lines, `run_display` is the face of the three. Afterwards: `run_data` reads the run folder; `charts`, `diagram`,
`tables` turn it into parts on the primitives of `svg`, `timeline_data` and `timeline_picture` say who waited for whom,
and `page` puts them into one self-contained `report.html`. `comparison` reads several runs, `comparing` says what they
brought beyond accuracy.

Every part stands for missing data: a policy without metrics, a gap, a single point, a value that is not finite.
"""
