BEGIN;

ALTER TABLE articles ADD COLUMN slug text;

UPDATE articles
SET slug = lower(regexp_replace(title, '[^a-zA-Z0-9]+', '-', 'g'))
WHERE slug IS NULL;

-- Titles that give the same slug get their id behind it.
UPDATE articles AS a
SET slug = a.slug || '-' || a.id
FROM (
    SELECT slug, min(id) AS first_id
    FROM articles
    GROUP BY slug
    HAVING count(*) > 1
) AS d
WHERE a.slug = d.slug AND a.id <> d.first_id;

ALTER TABLE articles ALTER COLUMN slug SET NOT NULL;
ALTER TABLE articles ADD CONSTRAINT articles_slug_key UNIQUE (slug);

DROP VIEW IF EXISTS published_articles;
CREATE VIEW published_articles AS
SELECT id, slug, title, summary, published_at
FROM articles
WHERE published_at IS NOT NULL AND published_at <= now() AND deleted_at IS NULL;

GRANT SELECT ON published_articles TO web;

COMMIT;
