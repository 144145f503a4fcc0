"""Layer sets, plans, trials and cost profiles in SQL; rows never leave this package."""
