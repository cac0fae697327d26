// SPDX-License-Identifier: Apache-2.0

package result

import (
	"errors"
	"fmt"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

func TestPermanentErrors(t *testing.T) {
	pods := schema.GroupResource{Resource: "pods"}
	if got := PermanentErrorText(fmt.Errorf("create: %w", apierrors.NewForbidden(pods, "p", errors.New("exceeded quota")))); got == "" {
		t.Error("a rejection by the API server is not reported")
	}
	if got := PermanentErrorText(apierrors.NewBadRequest(`admission webhook "policy.example.com" denied the request: keep it`)); got == "" {
		t.Error("a rejection by a webhook is not reported")
	}
	away := apierrors.NewInternalError(errors.New(`failed calling webhook "policy.example.com": connection refused`))
	if got := PermanentErrorText(fmt.Errorf("create: %w", away)); got == "" {
		t.Error("an unavailable webhook is not reported")
	}
	if got := PermanentErrorText(fmt.Errorf("plan: %w", &ForeignError{"PlacementPlan p exists and belongs to another owner: delete it"})); got == "" {
		t.Error("a conflicting object is not reported")
	}
	for _, err := range []error{nil, errors.New("connection refused"), apierrors.NewInternalError(errors.New("etcdserver: leader changed")), apierrors.NewConflict(pods, "p", errors.New("stale"))} {
		if got := PermanentErrorText(err); got != "" {
			t.Errorf("the temporary error %v is reported as %q", err, got)
		}
	}
}

func TestShortestDelay(t *testing.T) {
	for _, c := range []struct {
		times []time.Duration
		want  time.Duration
	}{
		{},
		{times: []time.Duration{0, 0}},
		{times: []time.Duration{0, 2}, want: 2},
		{times: []time.Duration{2, 0, 1}, want: 1},
		{times: []time.Duration{1, 0, 2}, want: 1},
	} {
		if got := ShortestDelay(c.times...); got != c.want {
			t.Errorf("of %v the shortest is %v, want %v", c.times, got, c.want)
		}
	}
}
