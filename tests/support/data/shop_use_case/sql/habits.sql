-- What a customer bought in four weeks, known a quarter of an hour after each order.
SELECT
    customer,
    ordered AS event_timestamp,
    ordered + INTERVAL 15 MINUTES AS created,
    count(*) OVER weeks AS orders_28d,
    sum(items) OVER weeks AS items_28d,
    (sum(amount) OVER weeks / sum(items) OVER weeks)::DOUBLE AS price_of_an_item,
FROM orders
WHERE ordered >= getvariable('window_start') - INTERVAL 672 HOURS
  AND ordered < getvariable('window_end')
WINDOW weeks AS (
    PARTITION BY customer ORDER BY ordered RANGE BETWEEN INTERVAL 672 HOURS PRECEDING AND CURRENT ROW
)
QUALIFY ordered >= getvariable('window_start')
