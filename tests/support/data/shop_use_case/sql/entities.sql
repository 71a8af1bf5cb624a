SELECT
    order_id::VARCHAR AS order_id,
    ordered + INTERVAL 1 HOUR AS event_timestamp,
    customer,
    town,
    age::FLOAT AS age,
    amount::FLOAT AS amount,
    coalesce(
        lead(ordered) OVER (PARTITION BY customer ORDER BY ordered) < ordered + INTERVAL 14 DAYS,
        false
    )::INTEGER AS again,
    NULL::VARCHAR AS excluded,
FROM orders
JOIN customers USING (customer)
WHERE ordered >= getvariable('window_start')
  AND ordered + INTERVAL 1 HOUR < getvariable('window_end')
