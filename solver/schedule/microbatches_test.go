// SPDX-License-Identifier: Apache-2.0

package schedule

import "testing"

// Exchanges get as many multiprocessors as DeepEP's kernels use where they take much of the time, and few where all
// activations are local. The number is unknown for an unknown GPU.
func TestMultiprocessorsOfMicroBatches(t *testing.T) {
	p := machines(t)
	s := made(t, small(), Inputs{8, 16, 0.3})
	of := func(lar float64) *MicroBatches {
		m, err := s.MicroBatches(p, 16, lar)
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	for _, tc := range []struct {
		lar  float64
		want int
	}{{0.1, exchangeMultiprocessors}, {1, 2}} {
		got, saved := of(tc.lar).Multiprocessors([]int{8192, 16384}, 2)
		if got != tc.want || (saved > 0) != (tc.want < exchangeMultiprocessors) {
			t.Errorf("local %v: %d multiprocessors save %v, want %d", tc.lar, got, saved, tc.want)
		}
	}
	for lar := 0.0; lar <= 1; lar += 0.05 {
		if got, saved := of(min(lar, 1)).Multiprocessors([]int{4096}, 2); got < 2 || got > exchangeMultiprocessors || got%2 != 0 || saved < 0 || saved >= 1 {
			t.Errorf("local %v: %d multiprocessors save %v", lar, got, saved)
		}
	}
	if got, saved := of(1).Multiprocessors(nil, 2); got != 0 || saved != 0 {
		t.Errorf("no sizes: %d, %v", got, saved)
	}
	p.GPU = "unknown"
	if got, saved := of(1).Multiprocessors([]int{8192}, 2); got != 0 || saved != 0 {
		t.Errorf("an unknown GPU: %d, %v", got, saved)
	}
}
