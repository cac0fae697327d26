import csv
import sys
from dataclasses import dataclass
from datetime import date


@dataclass(frozen=True)
class Booking:
    day: date
    account: str
    cents: int

    @classmethod
    def parse(cls, row):
        return cls(date.fromisoformat(row["day"]), row["account"].strip(), round(float(row["amount"]) * 100))


def balances(bookings):
    totals = {}
    for booking in sorted(bookings, key=lambda b: b.day):
        totals[booking.account] = totals.get(booking.account, 0) + booking.cents
    return totals


def main(path):
    with open(path, newline="", encoding="utf-8") as handle:
        bookings = [Booking.parse(row) for row in csv.DictReader(handle)]
    for account, cents in sorted(balances(bookings).items()):
        print(f"{account:<24}{cents / 100:>12.2f}")


if __name__ == "__main__":
    main(sys.argv[1])
