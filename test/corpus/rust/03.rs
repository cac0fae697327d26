/// A fixed-capacity cache that forgets what was used least recently.
pub struct Lru<K, V> {
    entries: Vec<(K, V, u64)>,
    capacity: usize,
    clock: u64,
}

impl<K: PartialEq, V> Lru<K, V> {
    pub fn new(capacity: usize) -> Self {
        assert!(capacity > 0, "the capacity must be positive");
        Lru { entries: Vec::with_capacity(capacity), capacity, clock: 0 }
    }

    pub fn get(&mut self, key: &K) -> Option<&V> {
        self.clock += 1;
        let clock = self.clock;
        self.entries.iter_mut().find(|(k, _, _)| k == key).map(|(_, value, used)| {
            *used = clock;
            &*value
        })
    }

    pub fn put(&mut self, key: K, value: V) {
        self.clock += 1;
        self.entries.retain(|(k, _, _)| *k != key);
        if self.entries.len() == self.capacity {
            let oldest = self.entries.iter().enumerate().min_by_key(|(_, e)| e.2).map(|(i, _)| i);
            if let Some(index) = oldest {
                self.entries.swap_remove(index);
            }
        }
        self.entries.push((key, value, self.clock));
    }
}
