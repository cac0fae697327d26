WITH RECURSIVE tree AS (
    SELECT id, parent_id, name, 1 AS depth, ARRAY[id] AS path
    FROM categories
    WHERE parent_id IS NULL
    UNION ALL
    SELECT c.id, c.parent_id, c.name, t.depth + 1, t.path || c.id
    FROM categories AS c
    JOIN tree AS t ON t.id = c.parent_id
    WHERE NOT c.id = ANY (t.path)
)
SELECT
    repeat('  ', t.depth - 1) || t.name AS category,
    count(p.id) AS products,
    min(p.price_cents) / 100.0 AS cheapest,
    max(p.price_cents) / 100.0 AS dearest
FROM tree AS t
LEFT JOIN products AS p ON p.category_id = t.id AND p.discontinued = false
GROUP BY t.path, t.depth, t.name
ORDER BY t.path;

EXPLAIN (ANALYZE, BUFFERS)
SELECT p.name, p.price_cents
FROM products AS p
WHERE p.category_id = 42 AND p.name ILIKE '%lamp%'
ORDER BY p.price_cents
LIMIT 20;
