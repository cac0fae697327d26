SELECT
    d.name AS department,
    e.last_name || ', ' || e.first_name AS employee,
    e.salary,
    round(avg(e.salary) OVER (PARTITION BY d.id)) AS department_average,
    m.last_name AS manager
FROM employees AS e
INNER JOIN departments AS d ON d.id = e.department_id
LEFT JOIN employees AS m ON m.id = e.manager_id
WHERE e.left_on IS NULL
  AND e.salary > (
      SELECT 1.2 * avg(x.salary)
      FROM employees AS x
      WHERE x.department_id = e.department_id AND x.left_on IS NULL
  )
ORDER BY d.name, e.salary DESC;

SELECT d.name, count(e.id) AS people, coalesce(sum(e.salary), 0) AS payroll
FROM departments AS d
LEFT JOIN employees AS e ON e.department_id = d.id AND e.left_on IS NULL
GROUP BY d.name
HAVING count(e.id) < 5
ORDER BY people, d.name;
