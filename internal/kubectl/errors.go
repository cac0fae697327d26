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

// Exit codes: 0 is done, also where it was so already.
const (
	// exitError: the cluster was not reached, or refuses, or something else has failed.
	exitError = 1
	// exitUsage: the command line must be changed.
	exitUsage = 2
	// exitNotFound: what is named does not exist, or the operator is not installed.
	exitNotFound = 3
	// exitState: it cannot be done as things are.
	exitState = 4
)

// codedError carries an exit code.
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

// told is an error in words that say what to do, with its exit code.
func told(err error) (string, int) {
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
		return "the cluster has no kind of semmoe.io: install the operator first, or name another cluster by --context", exitNotFound
	case apierrors.IsForbidden(err):
		return fmt.Sprintf("%v. The cluster roles view (to look) and edit (to change) have these rights", err), exitError
	case apierrors.IsUnauthorized(err):
		return "the cluster does not accept your credentials: log in again, or name another user by --context", exitError
	case clientcmd.IsEmptyConfig(err):
		return "no cluster is configured: name a file by --kubeconfig or KUBECONFIG", exitError
	case errors.As(err, &unreachable), errors.As(err, &unknownHost):
		where := ""
		if errors.As(err, &address) {
			if u, parsed := url.Parse(address.URL); parsed == nil {
				where = fmt.Sprintf(" at %s://%s", u.Scheme, u.Host)
			}
		}
		reason := error(unknownHost)
		if unknownHost == nil {
			reason = unreachable.Err
		}
		return fmt.Sprintf("the cluster cannot be reached%s (%v): check --context, --kubeconfig and the network", where, reason), exitError
	}
	return err.Error(), exitError
}

// isMissingKind tells a path that the API server does not serve from an object that it does not have.
func isMissingKind(err error) bool {
	var status apierrors.APIStatus
	return apierrors.IsNotFound(err) && errors.As(err, &status) && (status.Status().Details == nil || status.Status().Details.Name == "")
}
