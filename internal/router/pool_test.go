package router

import (
	"testing"

	"github.com/semmoe/operator/internal/router/discovery"
)

// Backends that stay keep their load when others come and go; an ejected one is used again where there is no other.
func TestPool(t *testing.T) {
	a, b := discovery.Backend{Pod: "a", Address: "a:1", Ranks: 1}, discovery.Backend{Pod: "b", Address: "b:1", Ranks: 1}
	pool := NewPool()
	pool.Set([]discovery.Backend{a})
	acquire := func(tokens int64, tried ...string) (*Lease, bool) {
		all := map[string]bool{}
		for _, address := range tried {
			all[address] = true
		}
		return pool.acquire(&request{tokens: tokens}, all)
	}
	first, _ := acquire(100)
	pool.Set([]discovery.Backend{a, b})
	if lease, ok := acquire(1); !ok || lease.Backend.Pod != "b" {
		t.Errorf("got %+v: the load of a was forgotten", lease)
	}
	first.Release()
	first.Release()
	if got := outstanding(pool); got != 1 {
		t.Errorf("%d tokens outstanding after a double release, want 1", got)
	}
	first.Eject()
	if lease, _ := acquire(10); lease.Backend.Pod != "b" {
		t.Error("an ejected backend was preferred")
	}
	if lease, ok := acquire(1, "b:1"); !ok || lease.Backend.Pod != "a" {
		t.Error("an ejected backend is not used where there is no other")
	}
	if _, ok := acquire(1, "a:1", "b:1"); ok {
		t.Error("a backend that was tried is used again")
	}
}
