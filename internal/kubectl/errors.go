// SPDX-License-Identifier: Apache-2.0

package kubectl

import (
	"errors"
	"fmt"
	"net"
	"net/url"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/semmoe/operator/internal/kubectl/change"
)

// Exit codes. 0 means success, also if nothing had to change.
const (
	// exitError means that the cluster is unreachable, the API server denied the request, or another error occurred.
	exitError = 1
	// exitUsage means that the command line is invalid.
	exitUsage = 2
	// exitNotFound means that a named object does not exist, or that the operator is not installed.
	exitNotFound = 3
	// exitState means that the present state of the objects does not allow the action.
	exitState = 4
)

// codedError is an error with an exit code.
type codedError struct {
	error
	code int
}

func (e codedError) Unwrap() error { return e.error }

func usageErrorf(format string, args ...any) error {
	return codedError{fmt.Errorf(format, args...), exitUsage}
}

func notFoundf(format string, args ...any) error {
	return codedError{fmt.Errorf(format, args...), exitNotFound}
}

// describeError returns a message that includes the user's action, and the exit code.
func describeError(err error) (string, int) {
	var coded codedError
	var state *change.StateError
	var unreachable *net.OpError
	var unknownHost *net.DNSError
	var address *url.Error
	switch {
	case errors.As(err, &coded):
		return coded.Error(), coded.code
	case errors.As(err, &state):
		return state.Error(), exitState
	case meta.IsNoMatchError(err), isMissingKind(err):
		return "the cluster has no semmoe.io resources: install the operator, or select another cluster with --context", exitNotFound
	case apierrors.IsForbidden(err):
		return fmt.Sprintf("%v. The cluster roles view (read) and edit (write) include the permissions", err), exitError
	case apierrors.IsUnauthorized(err):
		return "the cluster rejected the credentials: log in again, or select another user with --context", exitError
	case clientcmd.IsEmptyConfig(err):
		return "no cluster is configured: set --kubeconfig or KUBECONFIG", exitError
	case errors.As(err, &unreachable), errors.As(err, &unknownHost):
		endpoint := ""
		if errors.As(err, &address) {
			if u, parsed := url.Parse(address.URL); parsed == nil {
				endpoint = fmt.Sprintf(" at %s://%s", u.Scheme, u.Host)
			}
		}
		reason := error(unknownHost)
		if unknownHost == nil {
			reason = unreachable.Err
		}
		return fmt.Sprintf("failed to reach the cluster%s (%v): check --context, --kubeconfig and the network", endpoint, reason), exitError
	}
	return err.Error(), exitError
}

// isMissingKind reports whether the API server does not serve the requested resource type. It is false for a missing
// object.
func isMissingKind(err error) bool {
	var status apierrors.APIStatus
	return apierrors.IsNotFound(err) && errors.As(err, &status) && (status.Status().Details == nil || status.Status().Details.Name == "")
}
