package outcome

import (
	"errors"
	"fmt"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

func TestLasting(t *testing.T) {
	pods := schema.GroupResource{Resource: "pods"}
	if got := Lasting(fmt.Errorf("create: %w", apierrors.NewForbidden(pods, "p", errors.New("exceeded quota")))); got == "" {
		t.Error("what the API server refuses is not told")
	}
	away := apierrors.NewInternalError(errors.New(`failed calling webhook "policy.example.com": connection refused`))
	if got := Lasting(fmt.Errorf("create: %w", away)); got == "" {
		t.Error("a webhook that is away is not told")
	}
	for _, err := range []error{nil, errors.New("connection refused"), apierrors.NewInternalError(errors.New("etcdserver: leader changed")), apierrors.NewConflict(pods, "p", errors.New("stale"))} {
		if got := Lasting(err); got != "" {
			t.Errorf("%v is told as %q, although it passes", err, got)
		}
	}
}

func TestSoonest(t *testing.T) {
	for _, c := range [][3]time.Duration{{0, 0, 0}, {0, 2, 2}, {2, 0, 2}, {1, 2, 1}, {2, 1, 1}} {
		if got := Soonest(c[0], c[1]); got != c[2] {
			t.Errorf("of %v and %v the soonest is %v, want %v", c[0], c[1], got, c[2])
		}
	}
}
