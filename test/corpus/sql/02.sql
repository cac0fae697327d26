WITH monthly AS (
    SELECT
        date_trunc('month', o.ordered_at) AS month,
        c.country,
        count(*) AS orders,
        sum(o.total_cents) / 100.0 AS revenue
    FROM orders AS o
    JOIN customers AS c ON c.id = o.customer_id
    WHERE o.status IN ('paid', 'shipped')
      AND o.ordered_at >= now() - interval '12 months'
    GROUP BY 1, 2
)
SELECT
    month,
    country,
    orders,
    round(revenue, 2) AS revenue,
    round(100 * revenue / sum(revenue) OVER (PARTITION BY month), 1) AS share_percent,
    rank() OVER (PARTITION BY month ORDER BY revenue DESC) AS position,
    revenue - lag(revenue) OVER (PARTITION BY country ORDER BY month) AS change
FROM monthly
ORDER BY month DESC, revenue DESC
LIMIT 100;
