// SPDX-License-Identifier: Apache-2.0

package statuscache

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

type status struct {
	Phase string      `json:"phase,omitempty"`
	Since metav1.Time `json:"since"`
}

// at returns an object with a resource version, as in a cache.
func at(resourceVersion string) client.Object {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "o", ResourceVersion: resourceVersion}}
}

// A step is a decision made while the cache contains an object with some status.
type step struct {
	cachedAt, cached string
	decided          string
	answer           string // the resource version after the write; "" for a lost response
	want             bool   // whether it is written
}

func TestWrite(t *testing.T) {
	cases := map[string][]step{
		"the cached status is not written": {{"5", "A", "A", "6", false}},
		"back to the status of a stale cache": {
			{"5", "A", "B", "6", true}, {"5", "A", "A", "7", true}, {"5", "A", "A", "8", false}, {"6", "B", "A", "8", false}, {"7", "A", "A", "8", false},
		},
		"a stale cache causes no second write":          {{"5", "A", "B", "6", true}, {"5", "A", "B", "7", false}},
		"a later write of another client is the latest": {{"5", "A", "B", "6", true}, {"7", "C", "B", "8", true}, {"7", "C", "B", "9", false}},
		"after a lost response, the status may or may not be written": {
			{"5", "A", "B", "6", true}, {"5", "A", "A", "", true}, {"5", "A", "A", "8", true}, {"5", "A", "A", "9", false},
		},
		"a recreated object":       {{"5", "A", "B", "6", true}, {"9", "", "A", "10", true}},
		"versions of another kind": {{"x", "A", "B", "y", true}, {"x", "A", "B", "z", true}, {"y", "B", "B", "z", false}},
	}
	for name, steps := range cases {
		t.Run(name, func(t *testing.T) {
			var m Memory[status]
			for i, s := range steps {
				object := at(s.cachedAt)
				wrote := false
				_, err := m.Write(object, m.Latest(object, status{Phase: s.cached}), status{Phase: s.decided}, func(data []byte) (string, error) {
					wrote = true
					if want := `{"phase":"` + s.decided + `","since":null}`; string(data) != want {
						t.Errorf("step %d: written is %s, want %s", i, data, want)
					}
					if s.answer == "" {
						return "", errors.New("timeout awaiting response headers")
					}
					return s.answer, nil
				})
				if wrote != s.want || (err != nil) != (s.answer == "") {
					t.Errorf("step %d, %+v: written %t, %v", i, s, wrote, err)
				}
			}
		})
	}
}

func TestForeign(t *testing.T) {
	var m Memory[status]
	if m.Foreign(at("5"), status{Phase: "A"}) {
		t.Error("an unwritten status counts as foreign")
	}
	now := time.Date(2026, 1, 2, 3, 4, 5, 678, time.UTC) // with nanoseconds, which no cache contains
	written := status{"B", metav1.NewTime(now)}
	write := func(answer string) {
		m.Write(at("5"), status{Phase: "A"}, written, func([]byte) (string, error) { return answer, nil })
	}
	write("7")
	cached := status{"B", metav1.NewTime(now.Truncate(time.Second))}
	for _, c := range []struct {
		version string
		status  status
		want    bool
	}{
		{"6", status{Phase: "A"}, false}, {"7", cached, false}, {"8", cached, false}, {"8", status{Phase: "C"}, true}, {"8", status{}, true},
	} {
		if got := m.Foreign(at(c.version), c.status); got != c.want {
			t.Errorf("version %s with %+v: foreign %t, want %t", c.version, c.status, got, c.want)
		}
	}
	m.Forget(client.ObjectKeyFromObject(at("")))
	if m.Foreign(at("8"), status{}) {
		t.Error("an object that is forgotten is remembered")
	}

	// A change by another client is also detected for a status that needed no write.
	m.Write(at("8"), status{Phase: "A"}, status{Phase: "A"}, nil)
	if m.Foreign(at("8"), status{Phase: "A"}) || !m.Foreign(at("9"), status{Phase: "B"}) {
		t.Error("the status that was found is not compared with")
	}
}

// A cluster that was restored from an older state has permanently lower versions.
func TestCachedStatusExpires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var m Memory[status]
		m.Write(at("500"), status{Phase: "A"}, status{Phase: "B"}, func([]byte) (string, error) { return "501", nil })
		if got := m.Latest(at("5"), status{Phase: "A"}); got.Phase != "B" {
			t.Errorf("soon: %+v", got)
		}
		time.Sleep(maxCacheLag)
		if got := m.Latest(at("5"), status{Phase: "A"}); got.Phase != "A" {
			t.Errorf("later: %+v", got)
		}
	})
}
