CREATE TABLE sensors (
    sensor_id INTEGER PRIMARY KEY,
    place     VARCHAR(80) NOT NULL,
    unit      VARCHAR(12) NOT NULL
);

CREATE TABLE readings (
    sensor_id INTEGER NOT NULL,
    taken_at  TIMESTAMP NOT NULL,
    amount    DOUBLE PRECISION,
    PRIMARY KEY (sensor_id, taken_at),
    FOREIGN KEY (sensor_id) REFERENCES sensors (sensor_id)
);

SELECT
    s.place,
    EXTRACT(HOUR FROM r.taken_at) AS hour_of_day,
    AVG(r.amount) AS mean_amount,
    MIN(r.amount) AS lowest,
    MAX(r.amount) AS highest,
    COUNT(*) AS samples
FROM readings r
JOIN sensors s ON s.sensor_id = r.sensor_id
WHERE s.unit = 'celsius' AND r.amount IS NOT NULL
GROUP BY s.place, EXTRACT(HOUR FROM r.taken_at)
ORDER BY s.place, hour_of_day;

DELETE FROM readings
WHERE taken_at < CURRENT_TIMESTAMP - INTERVAL '400' DAY;
