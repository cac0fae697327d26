package view

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/duration"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/kubectl/terminal"
)

// percent is a rate in thousandths.
func percent(milli int32) string { return fmt.Sprintf("%.1f%%", float64(milli)/10) }

// ago is how long it is since a time, as kubectl prints ages.
func ago(since, now time.Time) string { return duration.HumanDuration(now.Sub(since)) }

// bytesText is a number of bytes in the largest unit that leaves a whole part.
func bytesText(bytes int64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB", "PiB"}
	value, unit := float64(bytes), 0
	for value >= 1024 && unit < len(units)-1 {
		value, unit = value/1024, unit+1
	}
	if unit == 0 {
		return fmt.Sprintf("%d B", bytes)
	}
	return fmt.Sprintf("%.1f %s", value, units[unit])
}

// plural is a number with its noun; nouns here take an s.
func plural[N int | int32 | int64](n N, noun string) string {
	if n == 1 {
		return fmt.Sprintf("1 %s", noun)
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// condition is one of an object's conditions; Unknown where it has none of the type.
func condition(conditions []metav1.Condition, kind string) metav1.Condition {
	if found := meta.FindStatusCondition(conditions, kind); found != nil {
		return *found
	}
	return metav1.Condition{Type: kind, Status: metav1.ConditionUnknown, Reason: "NotReported", Message: "The operator has not looked at it yet"}
}

// wrongWhenTrue are the conditions that tell of a fault while they are True, and passing those that come and go without one.
var (
	wrongWhenTrue = []string{semmoev1.ConditionDegraded, semmoev1.ConditionStalled}
	passing       = []string{semmoev1.ConditionProgressing, semmoev1.ConditionReconciling}
)

// toneOf is what the status of a condition says.
func toneOf(c metav1.Condition) terminal.Tone {
	held := c.Status == metav1.ConditionTrue
	switch {
	case c.Status == metav1.ConditionUnknown:
		return terminal.Faint
	case slices.Contains(wrongWhenTrue, c.Type) && held:
		return terminal.Bad
	case slices.Contains(passing, c.Type) && held:
		return terminal.Busy
	case slices.Contains(wrongWhenTrue, c.Type), slices.Contains(passing, c.Type):
		return terminal.Plain
	case held:
		return terminal.Good
	case c.Type == semmoev1.ConditionReady:
		return terminal.Bad
	}
	return terminal.Busy
}

// bar is a share of 1 as ten blocks.
func bar(share float64) string {
	full := int(10*min(max(share, 0), 1) + 0.5)
	return strings.Repeat("█", full) + strings.Repeat("░", 10-full)
}

// list joins what is not empty by commas.
func list(parts ...string) string {
	return strings.Join(slices.DeleteFunc(parts, func(part string) bool { return part == "" }), ", ")
}

// newestFirst orders by age, and by name where that is the same.
func newestFirst[T any, P interface {
	*T
	metav1.Object
}](objects []T) {
	slices.SortStableFunc(objects, func(a, b T) int {
		x, y := P(&a), P(&b)
		return cmp.Or(y.GetCreationTimestamp().Compare(x.GetCreationTimestamp().Time), strings.Compare(x.GetName(), y.GetName()))
	})
}
