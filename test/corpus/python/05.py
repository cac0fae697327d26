import unittest

from inventory import Inventory, OutOfStock


class InventoryTest(unittest.TestCase):
    def setUp(self):
        self.inventory = Inventory()
        self.inventory.add("bolt", 40)
        self.inventory.add("nut", 25)

    def test_remove_reduces_the_count(self):
        self.inventory.remove("bolt", 15)
        self.assertEqual(self.inventory.count("bolt"), 25)

    def test_remove_of_too_many_raises(self):
        with self.assertRaises(OutOfStock) as caught:
            self.inventory.remove("nut", 26)
        self.assertIn("nut", str(caught.exception))
        self.assertEqual(self.inventory.count("nut"), 25)

    def test_unknown_article_counts_zero(self):
        self.assertEqual(self.inventory.count("washer"), 0)

    def test_report_is_sorted_by_name(self):
        self.inventory.add("axle", 3)
        names = [line.split()[0] for line in self.inventory.report().splitlines()]
        self.assertEqual(names, ["axle", "bolt", "nut"])


if __name__ == "__main__":
    unittest.main()
