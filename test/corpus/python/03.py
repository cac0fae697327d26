import numpy as np


class KMeans:
    def __init__(self, clusters=8, rounds=100, seed=0):
        self.clusters = clusters
        self.rounds = rounds
        self.random = np.random.default_rng(seed)
        self.centres = None

    def fit(self, points):
        points = np.asarray(points, dtype=float)
        chosen = self.random.choice(len(points), self.clusters, replace=False)
        self.centres = points[chosen].copy()
        for _ in range(self.rounds):
            labels = self.predict(points)
            moved = 0.0
            for k in range(self.clusters):
                members = points[labels == k]
                if len(members) == 0:
                    continue
                centre = members.mean(axis=0)
                moved = max(moved, np.abs(centre - self.centres[k]).max())
                self.centres[k] = centre
            if moved < 1e-6:
                break
        return self

    def predict(self, points):
        squared = ((points[:, None, :] - self.centres[None, :, :]) ** 2).sum(axis=2)
        return squared.argmin(axis=1)
