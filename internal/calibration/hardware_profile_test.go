// SPDX-License-Identifier: Apache-2.0

package calibration

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"os"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/calibration/machines"
	"github.com/semmoe/operator/solver/cost/hardware"
)

// inConfigMap returns a reference to a key of the ConfigMap mine.
func inConfigMap(key string) *semmoev1.HardwareReference {
	return &semmoev1.HardwareReference{ConfigMap: &semmoev1.HardwareConfigMap{Name: "mine", Key: key}}
}

// own returns the text of a user-provided profile.
func own(t *testing.T) string {
	t.Helper()
	profile := *hardware.DefaultProfile()
	profile.Name = "mine"
	text, err := json.MarshalIndent(profile, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func reader(t *testing.T) client.Reader {
	t.Helper()
	measured, err := os.ReadFile("testdata/h200x2.json")
	if err != nil {
		t.Fatal(err)
	}
	return fake.NewClientBuilder().WithObjects(
		&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "mine"}, Data: map[string]string{
			"hardware.json": own(t), "calibration.json": string(measured), "broken": "{", "other": `{"format":"x"}`, "few": `{"all_to_all":[]}`,
		}},
		&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "empty"}},
	).Build()
}

func TestReadOwn(t *testing.T) {
	chosen, err := ReadProfile(t.Context(), reader(t), "n", inConfigMap("hardware.json"))
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256([]byte(own(t)))
	if chosen.Profile.Name != "mine" || chosen.Digest != hex.EncodeToString(sum[:]) {
		t.Errorf("profile %q of digest %s", chosen.Profile.Name, chosen.Digest)
	}
	fitted, err := ReadProfile(t.Context(), reader(t), "n", inConfigMap("calibration.json"))
	if err != nil || fitted.Profile.Name != "mine" || fitted.Profile.GPU == "" || fitted.Digest == chosen.Digest {
		t.Errorf("fitted profile: %+v, %v", fitted.Profile, err)
	}
}

func TestReadBuiltIn(t *testing.T) {
	for name, of := range map[string]*semmoev1.HardwareReference{"none": nil, "the default": {BuiltIn: hardware.Default}} {
		if chosen, err := ReadProfile(t.Context(), reader(t), "n", of); err != nil || chosen != (machines.ResolvedProfile{}) || machines.ReferenceForPlan(of) != nil {
			t.Errorf("%s: %+v, %v, named %+v", name, chosen, err, machines.ReferenceForPlan(of))
		}
	}
	if of := inConfigMap("hardware.json"); machines.ReferenceForPlan(of) != of {
		t.Error("ReferenceForPlan changed the reference to a ConfigMap")
	}
}

func TestReadInvalidReferences(t *testing.T) {
	named := func(name string) *semmoev1.HardwareReference {
		return &semmoev1.HardwareReference{ConfigMap: &semmoev1.HardwareConfigMap{Name: name, Key: "hardware.json"}}
	}
	for want, test := range map[string]struct {
		of     *semmoev1.HardwareReference
		reason string
	}{
		`builtIn: there is no built-in hardware profile "abacus"; there are h200-nvlink`:                   {&semmoev1.HardwareReference{BuiltIn: "abacus"}, "HardwareProfileInvalid"},
		`configMap: there is no ConfigMap "gone" in namespace n: create it`:                                {named("gone"), machines.NotFound},
		`configMap: there is no ConfigMap "a/b" in namespace n: create it`:                                 {named("a/b"), machines.NotFound},
		`configMap.key: ConfigMap mine has no key "x"; it has broken, calibration.json`:                    {inConfigMap("x"), machines.NotFound},
		`configMap.key: ConfigMap empty has no key "hardware.json"; it has none`:                           {named("empty"), machines.NotFound},
		`configMap: key "broken" of ConfigMap mine is neither a hardware profile nor a calibration: unexp`: {inConfigMap("broken"), "HardwareProfileInvalid"},
		`format is "x"; it must be`:               {inConfigMap("other"), "HardwareProfileInvalid"},
		`all_to_all has 0 measurements; at least`: {inConfigMap("few"), "HardwareProfileInvalid"},
	} {
		_, err := ReadProfile(t.Context(), reader(t), "n", test.of)
		if fault := machines.AsProfileError(err); fault == nil || !strings.Contains(err.Error(), want) || fault.Reason != test.reason {
			t.Errorf("error %v (%+v), want %s with %q", err, fault, test.reason, want)
		}
	}
}

// TestReadWithoutServer verifies that an unreachable API server is not reported as an invalid profile.
func TestReadWithoutServer(t *testing.T) {
	away := errors.New("connection refused")
	r := fake.NewClientBuilder().WithInterceptorFuncs(interceptor.Funcs{
		Get: func(context.Context, client.WithWatch, client.ObjectKey, client.Object, ...client.GetOption) error {
			return away
		},
	}).Build()
	if _, err := ReadProfile(t.Context(), r, "n", inConfigMap("hardware.json")); !errors.Is(err, away) || machines.AsProfileError(err) != nil {
		t.Errorf("error %v", err)
	}
}

func BenchmarkReadMeasurements(b *testing.B) {
	text, err := os.ReadFile("testdata/h200x2.json")
	if err != nil {
		b.Fatal(err)
	}
	configMap := &corev1.ConfigMap{Data: map[string]string{"calibration.json": string(text)}}
	for b.Loop() {
		if _, err := machines.Resolve(inConfigMap("calibration.json"), "n", configMap); err != nil {
			b.Fatal(err)
		}
	}
}
