CREATE OR REPLACE FUNCTION transfer(sender bigint, receiver bigint, cents bigint)
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    available bigint;
BEGIN
    IF cents <= 0 THEN
        RAISE EXCEPTION 'amount must be positive, not %', cents;
    END IF;

    -- Both rows are locked in the order of their ids, so that two transfers cannot wait for each other.
    PERFORM 1 FROM accounts WHERE id IN (sender, receiver) ORDER BY id FOR UPDATE;

    SELECT balance INTO available FROM accounts WHERE id = sender;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'account % does not exist', sender;
    ELSIF available < cents THEN
        RAISE EXCEPTION 'account % has only % cents', sender, available;
    END IF;

    UPDATE accounts SET balance = balance - cents WHERE id = sender;
    UPDATE accounts SET balance = balance + cents WHERE id = receiver;
    INSERT INTO transfers (sender_id, receiver_id, cents, booked_at) VALUES (sender, receiver, cents, now());
END;
$$;
