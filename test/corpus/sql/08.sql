MERGE INTO stock AS s
USING (
    SELECT article_id, warehouse_id, sum(quantity) AS quantity
    FROM deliveries
    WHERE booked = false
    GROUP BY article_id, warehouse_id
) AS d
ON s.article_id = d.article_id AND s.warehouse_id = d.warehouse_id
WHEN MATCHED THEN
    UPDATE SET quantity = s.quantity + d.quantity, changed_at = CURRENT_TIMESTAMP
WHEN NOT MATCHED THEN
    INSERT (article_id, warehouse_id, quantity, changed_at)
    VALUES (d.article_id, d.warehouse_id, d.quantity, CURRENT_TIMESTAMP);

UPDATE deliveries SET booked = true WHERE booked = false;

CREATE TRIGGER stock_not_negative
BEFORE UPDATE ON stock
FOR EACH ROW
WHEN (NEW.quantity < 0)
EXECUTE FUNCTION refuse_negative_stock();

SELECT a.number, a.label, coalesce(sum(s.quantity), 0) AS available, a.minimum
FROM articles a
LEFT JOIN stock s ON s.article_id = a.id
GROUP BY a.number, a.label, a.minimum
HAVING coalesce(sum(s.quantity), 0) < a.minimum;
