// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"math"
	"slices"
	"testing"
)

// The choice is right wherever the measured times differ by more than 5%, also where the point itself is taken out of the table.
func TestChooseIsRightOnMeasuredPoints(t *testing.T) {
	p := builtInProfile(t)
	all := slices.Clone(p.Products)
	judged, heldOut, right := 0, 0, 0
	for i, m := range all {
		if math.Abs(m.Microseconds/m.Dense-1) <= .05 {
			continue
		}
		judged++
		want := m.Microseconds < m.Dense
		p.Products = all
		if got := p.Choose(m.Hidden, m.Inter, m.Experts, m.TokensPerExpert); got.Grouped != want || math.Abs(got.Microseconds/min(m.Microseconds, m.Dense)-1) > 1e-9 {
			t.Errorf("%+v: chosen was %+v", m, got)
		}
		p.Products = slices.Delete(slices.Clone(all), i, i+1)
		heldOut++
		if p.Choose(m.Hidden, m.Inter, m.Experts, m.TokensPerExpert).Grouped == want {
			right++
		}
	}
	t.Logf("%d points differ by more than 5%%; held out, %d of %d are chosen rightly", judged, right, heldOut)
	if judged < 20 || right < heldOut-1 {
		t.Errorf("held out, %d of %d points are chosen rightly", right, heldOut)
	}
}

// Between and beyond the measured loads times do not fall, and without a table the models decide.
func TestChooseOutsideTheMeasuredLoads(t *testing.T) {
	p := builtInProfile(t)
	if a, b := p.Choose(7168, 2048, 32, 4096).Microseconds, p.Choose(7168, 2048, 32, 8192).Microseconds; math.Abs(b/a-2) > 1e-9 {
		t.Errorf("twice the load beyond the table takes %v, after %v", b, a)
	}
	if got, half := p.Choose(7168, 2048, 32, 1024), p.Choose(7168, 2048, 16, 1024); math.Abs(half.Microseconds/got.Microseconds-0.5) > 1e-9 {
		t.Errorf("half of the experts take %v, all %v", half, got)
	}
	p.Products = nil
	if got := p.Choose(2048, 768, 16, 1); !got.Grouped || got.Microseconds != p.Grouped.Microseconds(16*2048*2*768, 1) {
		t.Errorf("without a table: %+v", got)
	}
}
