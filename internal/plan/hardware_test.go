// SPDX-License-Identifier: Apache-2.0

package plan_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/plan/bundle"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/placement"
)

func TestHardwareIsPartOfThePlan(t *testing.T) {
	p := solved(t, placement.DataParallel)
	without := encode(t, p)
	p.Hardware = hardware.DefaultProfile()
	if a := encode(t, p); a.Digest != without.Digest || a.Files[plan.HardwareFile] != nil {
		t.Error("the built-in default profile changes the plan")
	}
	mine := *hardware.DefaultProfile()
	mine.Name, mine.AllToAll.PerMicrosecond = "mine", 1e4
	p.Hardware = &mine
	dir, a := written(t, p)
	if a.Digest == without.Digest || a.Manifest.LayoutDigest != without.Manifest.LayoutDigest {
		t.Error("the plan digest must cover the hardware profile, and the layout digest must not")
	}
	got, _, err := plan.Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(&mine, got.Hardware); diff != "" || got.Machines() != got.Hardware {
		t.Errorf("the profile that was read differs:\n%s", diff)
	}
	data, err := bundle.ConfigMapData(a, "SGLang")
	if err != nil || data[plan.HardwareFile] != string(a.Files[plan.HardwareFile]) {
		t.Errorf("the ConfigMap has %.40q, error %v", data[plan.HardwareFile], err)
	}
	for name, text := range map[string]string{"no JSON": "{", "other fields": `{"when":"now"}`, "empty": "{}"} {
		broken := encode(t, p)
		broken.Files[plan.HardwareFile] = []byte(text)
		if _, err := plan.Decode(broken); !plan.IsInvalid(err) || !strings.Contains(err.Error(), plan.HardwareFile) {
			t.Errorf("%s: error %v", name, err)
		}
	}
	if without, err := plan.Decode(without); err != nil || without.Machines() != hardware.DefaultProfile() {
		t.Errorf("plan without a hardware profile: machines %+v, error %v", without.Machines(), err)
	}
}
