CREATE TABLE customers (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    email       text NOT NULL UNIQUE,
    full_name   text NOT NULL,
    country     char(2) NOT NULL DEFAULT 'DE',
    created_at  timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE orders (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    customer_id  bigint NOT NULL REFERENCES customers (id) ON DELETE RESTRICT,
    status       text NOT NULL CHECK (status IN ('open', 'paid', 'shipped', 'cancelled')),
    total_cents  bigint NOT NULL CHECK (total_cents >= 0),
    ordered_at   timestamptz NOT NULL DEFAULT now()
);

CREATE INDEX orders_by_customer ON orders (customer_id, ordered_at DESC);
CREATE INDEX orders_open ON orders (ordered_at) WHERE status = 'open';

INSERT INTO customers (email, full_name, country) VALUES
    ('anna@example.com', 'Anna Berg', 'SE'),
    ('luis@example.com', 'Luis Ortega', 'ES'),
    ('mei@example.com', 'Mei Tanaka', 'JP');
