-- An hour after each figure is out: will the next one be higher?
SELECT
    series || strftime(published, ' %Y%m%d') AS row_name,
    published + INTERVAL 1 HOUR AS event_timestamp,
    series,
    extract(week FROM published)::FLOAT AS week_of_year,
    (next_value > value)::INTEGER AS rises,
    CASE WHEN next_value IS NULL THEN 'next week is not known' END AS excluded,
FROM figures
WHERE published >= getvariable('window_start')
  AND published + INTERVAL 1 HOUR < getvariable('window_end')
