package transition

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
)

// One reason is told once, unless as a warning too.
func TestTell(t *testing.T) {
	recorder := events.NewFakeRecorder(10)
	teller := NewTeller(recorder, nil, nil)
	condition := func(kind string, status metav1.ConditionStatus, reason string) *metav1.Condition {
		return &metav1.Condition{Type: kind, Status: status, Reason: reason, Message: "for " + kind}
	}
	teller.Tell(condition("Progressing", metav1.ConditionTrue, "Solving"), false)
	teller.Tell(condition("Ready", metav1.ConditionFalse, "Solving"), false)
	teller.Tell(condition("Degraded", metav1.ConditionTrue, "Solving"), true)
	teller.Tell(condition("Planned", metav1.ConditionTrue, "Planned"), false)
	close(recorder.Events)
	var told []string
	for note := range recorder.Events {
		told = append(told, note)
	}
	want := []string{
		"Normal Solving Progressing is True: for Progressing", "Warning Solving Degraded is True: for Degraded", "Normal Planned Planned is True: for Planned",
	}
	if diff := cmp.Diff(want, told); diff != "" {
		t.Error(diff)
	}
}
